"""Plans as data: to check, keep, read and print."""
