"""``python -m draftproof``: the command line."""

from .cli import main

main()
