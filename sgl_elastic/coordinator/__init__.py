"""The front door: where requests enter, where they go, and when the instance behind it changes."""
