"""The error for mistakes that a user can make and should read about."""


class InputError(ValueError):
    """A checkpoint, option or prompt that can't be used.

    The message is one sentence: what is wrong, the value, and what would be right. The command
    line prints it on standard error and exits with status 2.
    """


class LostRank(RuntimeError):
    """Another rank of the group is gone: nothing may be sent to it any more."""
