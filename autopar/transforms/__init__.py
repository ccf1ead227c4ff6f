"""The trace of a step written anew: padded, in chunks of layers, in leaner loops."""
