"""What imports of all tools share."""
