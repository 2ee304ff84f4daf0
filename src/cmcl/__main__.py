"""`python -m cmcl`: the command, where it is not installed."""

from .cli import main

main()
