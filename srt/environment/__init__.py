"""What a bug report needs of machine and installation."""
