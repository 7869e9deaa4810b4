"""The IMM: engines that start, park, attach, serve and leave."""
