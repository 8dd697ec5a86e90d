"""The stage `verify`: reads everything that was written again, and says what is wrong with it."""
