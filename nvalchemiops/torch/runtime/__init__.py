"""What runs ops: launches on torch's streams, threads, memory, results that are kept, and who is watching a call."""
