"""`python -m rcd` is the command `rcd`."""

from rcd.cli.main import main

main()
