"""The pair that ships with the package: a small target and a drafter trained on it."""
