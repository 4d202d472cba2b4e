"""An OpenAI-compatible server over the decode loop (extra `serve`)."""
