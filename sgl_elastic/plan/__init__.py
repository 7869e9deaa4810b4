"""What a scale will do, worked out before anything is done. Pure: no clock, device or socket."""
