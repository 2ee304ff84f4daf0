"""`python -m cmcl.cli`: the command, where it is not installed."""

from . import main

main()
