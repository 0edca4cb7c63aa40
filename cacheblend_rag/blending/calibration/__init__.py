"""What calibration measures: how near a blend of a prompt comes to full recompute, and at what compute."""
