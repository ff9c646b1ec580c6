"""What is the same for every algorithm and datamodule: arguments, state, curves, resume, checks of foreign objects."""
