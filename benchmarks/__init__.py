"""Side-by-side runs; none of them is a test."""
