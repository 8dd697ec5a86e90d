"""What people look at: pictures of packs."""
