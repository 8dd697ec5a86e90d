"""Where bytes lie: folders here and elsewhere, listings, locators, rows of tables."""
