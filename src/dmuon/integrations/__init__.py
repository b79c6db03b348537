"""dmuon in the programs people have, one module for each; nothing else imports them."""
