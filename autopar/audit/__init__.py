"""What a program's text says it does, beside what its plan says."""
