"""Reading stored bytes: locators, rows of tables, content of folders."""
