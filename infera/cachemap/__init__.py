"""What every worker and tier holds: event decoders in, longest match out."""
