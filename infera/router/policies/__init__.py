"""The policies that come with Infera, one a file."""
