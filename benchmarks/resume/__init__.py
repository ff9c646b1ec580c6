"""Kills training processes of several libraries at random moments and compares with the run that was never killed."""
