"""How cost grows: curves that scaling.py measures and draws."""
