"""Files of object storage (s3://, gs://, az://, msc://), read and written like local files."""
