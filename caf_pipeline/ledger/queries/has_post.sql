-- Returns whether a transaction of this ledger posted a chunk of the archive, or may, or a chunk was restored from it.
-- Another program posted the adopted files.
SELECT EXISTS (SELECT FROM chunk_copies AS copies JOIN caf_files USING (caf_file_id) JOIN sources USING (source_id)
    WHERE coalesce(copies.archive_id, sources.archive_id) = %(archive)s AND adopted_at IS NULL
        AND (start IS NOT NULL OR EXISTS (SELECT FROM transaction_posts AS posts
            WHERE posts.caf_file_id = copies.caf_file_id AND live)))
