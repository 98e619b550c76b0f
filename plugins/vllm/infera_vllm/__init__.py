"""vLLM plugin of Infera: command-line wiring and the KV connector."""
