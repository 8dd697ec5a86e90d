"""The methods of other packers, for comparison and for plans that must equal theirs."""
