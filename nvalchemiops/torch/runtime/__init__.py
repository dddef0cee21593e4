"""The machinery that runs ops: plans, compiled calls, threads, memory, cached results, and the context of a call."""
