"""`python -m oneround.cli` is the command `oneround`."""

from oneround.cli import main

main()
