"""Steps as users hold them: planned, lowered and compiled, and what became of them."""
