"""The parameters that an accuracy needs: chosen by models of errors, from sizes and strengths of a system."""
