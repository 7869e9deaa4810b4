"""What stands before a route: bodies, names, limits in time, answers to what is refused."""
