"""Messages as they are typed, with history and several lines, or as they come through a pipe."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from dspine_mlx.cache_folder import cache_folder

HISTORY = "chat-history"


def prompted(figures: Callable[[], str]) -> Iterator[str]:
    """Messages typed at a prompt that begins with the figures; Ctrl-D ends them."""
    session: PromptSession[str] = PromptSession(
        history=history(cache_folder()), key_bindings=keys(), multiline=True
    )
    while True:
        shown = figures()
        prompt: StyleAndTextTuples = [("ansibrightblack", f"[{shown}] " if shown else "")]
        try:
            yield session.prompt([*prompt, ("bold", "> ")], prompt_continuation="  ")
        except KeyboardInterrupt:  # drops what was typed
            continue
        except EOFError:
            return


def lines_of(stream: TextIO | None) -> Iterator[str]:
    """A message per line."""
    yield from (line.rstrip("\n") for line in stream or ())


def keys() -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J, or a backslash before Enter, start a new line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def history(folder: Path) -> History:
    """Kept in a file that only this user can read; for this chat only, where that can't be."""
    path = folder / HISTORY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
