-- Records a chunk's message for the account's next transaction, replacing an earlier message.
-- Changes nothing if the account has a live post of the chunk.
INSERT INTO posts AS old (caf_file_id, account, message, charged_bytes, epoch)
SELECT %(id)s, %(account)s, %(message)s, %(charged_bytes)s, %(epoch)s WHERE NOT EXISTS (
    SELECT FROM transaction_posts WHERE caf_file_id = %(id)s AND account = %(account)s AND live)
ON CONFLICT (caf_file_id, account) DO UPDATE SET
    message = excluded.message, charged_bytes = excluded.charged_bytes, epoch = excluded.epoch,
    asked_at = excluded.asked_at
WHERE (old.message, old.charged_bytes, old.epoch) <> (excluded.message, excluded.charged_bytes, excluded.epoch)
  AND old.epoch <= excluded.epoch
