"""`memopt bench`: methods compared by training with each in a process of its own."""
