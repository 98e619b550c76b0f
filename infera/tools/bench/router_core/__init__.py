"""What the router's core costs: events in, matches and picks out."""
