"""Raw public datasets to oxRL's JSONL or Parquet, one file per dataset."""
