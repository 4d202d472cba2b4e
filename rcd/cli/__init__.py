"""The command `rcd`: one file a verb."""
