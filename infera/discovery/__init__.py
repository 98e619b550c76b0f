"""Who is in the fleet: worker records and the registries that keep them. Imports nothing."""
