"""Environments that were written for other libraries, as environments of dialogues."""
