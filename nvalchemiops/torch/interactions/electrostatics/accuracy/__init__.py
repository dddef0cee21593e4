"""Parameters that meet an accuracy, chosen by error models from the sizes and source strengths of a system."""
