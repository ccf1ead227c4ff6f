"""Every operator whole on one device, and which device that is."""
