"""Where the bytes of a sample lie (locators), and how rows and streams are read from there."""
