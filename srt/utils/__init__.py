"""Facts about the machine that several parts ask for."""
