"""Which public drafters exist, which fit a target, and what they should gain here."""
