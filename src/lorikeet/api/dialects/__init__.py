"""Routes of other servers. Each module turns one server's bodies into completions, and answers in its form."""
