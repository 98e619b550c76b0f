"""How requests reach workers. Today over HTTP; NATS will stand beside it."""
