"""A page that shows the cluster while it works: nodes, sessions, turns as they run, and a chat to break it with."""
