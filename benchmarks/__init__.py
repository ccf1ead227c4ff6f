"""Models and programs that measure autopar; nothing in `autopar` imports them."""
