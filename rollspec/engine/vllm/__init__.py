"""The only place that knows vLLM internals."""
