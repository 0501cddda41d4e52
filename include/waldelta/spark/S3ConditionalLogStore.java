package waldelta.spark;

import io.delta.storage.HadoopFileSystemLogStore;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.security.DigestInputStream;
import java.security.DigestOutputStream;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * Delta's log store for S3 with commits that are put-if-absent, as delta-rs makes them.
 *
 * <p>Delta's own log store for S3 checks that a commit is absent and then writes it without a
 * condition. A commit that another writer makes in between is overwritten, and its changes are lost
 * without an error. Delta has no other one that needs no DynamoDB table (delta-io/delta#3596,
 * delta-io/delta#4813). S3 itself refuses to overwrite an object when the request has the header
 * {@code If-None-Match: *}, which Hadoop's S3A sends since 3.4.2, for files that are created with
 * {@code fs.option.create.conditional.overwrite}.
 *
 * <p>Nothing is cached: S3 lists an object as soon as it is written, and other writers may have
 * removed what this one wrote.
 */
public class S3ConditionalLogStore extends HadoopFileSystemLogStore {
    private static final String IF_ABSENT = "fs.option.create.conditional.overwrite";

    /** Creates the log store as Delta does, with the session's Hadoop configuration. */
    public S3ConditionalLogStore(Configuration conf) {
        super(conf);
    }

    /**
     * Writes a file of the log.
     *
     * @throws FileAlreadyExistsException if the file exists, was written by another writer, and
     *     {@code overwrite} is false
     */
    @Override
    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration conf)
            throws IOException {
        FileSystem files = path.getFileSystem(conf);
        if (overwrite) {
            writeLines(files.create(path, true), actions, newDigest());
            return;
        }
        MessageDigest written = newDigest();
        try {
            writeLines(createIfAbsent(files, path), actions, written);
        } catch (IOException failure) {
            if (!isWritten(files, path, written.digest(), failure)) {
                IOException exists = new FileAlreadyExistsException(path.toString());
                exists.initCause(failure);
                throw exists;
            }
        }
    }

    /** Returns false: S3 shows an object only when it is complete. */
    @Override
    public Boolean isPartialWriteVisible(Path path, Configuration conf) {
        return false;
    }

    private static OutputStream createIfAbsent(FileSystem files, Path path) throws IOException {
        FSDataOutputStreamBuilder<?, ?> builder = files.createFile(path);
        return builder.create().recursive().must(IF_ABSENT, true).build();
    }

    /** Writes lines, and closes the stream only when all are written: closing it is the commit. */
    private static void writeLines(
            OutputStream stream, Iterator<String> lines, MessageDigest digest) throws IOException {
        OutputStream digested = new DigestOutputStream(stream, digest);
        while (lines.hasNext()) {
            digested.write((lines.next() + "\n").getBytes(StandardCharsets.UTF_8));
        }
        stream.close();
    }

    /**
     * Returns whether the file that exists after a failed write is this writer's own.
     *
     * <p>The answer to the first request may be lost. The SDK repeats the request, which S3 then
     * refuses because of this writer's own file. Equal bytes are the same commit, because each one
     * names its transaction.
     *
     * @throws IOException {@code failure} itself, if there is no file or it can't be read
     */
    private static boolean isWritten(
            FileSystem files, Path path, byte[] written, IOException failure) throws IOException {
        MessageDigest stored = newDigest();
        try (InputStream stream = new DigestInputStream(files.open(path), stored)) {
            stream.transferTo(OutputStream.nullOutputStream());
        } catch (IOException unreadable) {
            failure.addSuppressed(unreadable);
            throw failure;
        }
        return Arrays.equals(stored.digest(), written);
    }

    private static MessageDigest newDigest() {
        try {
            return MessageDigest.getInstance("SHA-256");
        } catch (NoSuchAlgorithmException err) {
            throw new IllegalStateException("every Java has SHA-256", err);
        }
    }
}
