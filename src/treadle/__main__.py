"""`python -m treadle` is the `treadle` command."""

from .cli import main

main()
